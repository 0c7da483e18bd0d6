//! Architectures of any type, and the arrays that they are built for.

use isobar_array::Array;
use isobar_shard::{ModelSize, Parallel, ParamCount, Scope, ShardTensor};
use serde_json::Value;
use tch::Tensor;

use super::{Architecture, LargestArray, Model};
use crate::diffusion::Denoiser;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// An [`Architecture`] of any type.
pub(crate) trait AnyArchitecture: std::fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn model_parallel(&self) -> bool;
    fn time_unit(&self) -> Option<&'static str>;
    fn table(&self) -> serde_json::Result<Value>;
    fn copied(&self) -> Box<dyn AnyArchitecture>;
    fn build_dense(&self, params: &mut Scope<'_, Tensor>) -> Result<Box<dyn Model<Tensor>>>;
    fn build_sharded(&self, params: &mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>>;
    fn check(&self, fields: &FieldSpec) -> Result<()>;
    fn unread(&self) -> Vec<String>;
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize>;
    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray>;
    fn traffic(&self, split: &Split) -> Option<Traffic>;
    fn sharding(&self) -> Sharding;
    fn signature(&self) -> Signature;
    fn refinement(&self) -> usize;
    fn output_extents(&self, extents: &[usize]) -> Vec<usize>;
    fn denoises(&self) -> Option<Denoiser>;
    fn reads_patches(&self) -> bool;
}

impl<C: Architecture> AnyArchitecture for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn model_parallel(&self) -> bool {
        C::MODEL_PARALLEL
    }

    fn time_unit(&self) -> Option<&'static str> {
        C::TIME_UNIT
    }

    fn table(&self) -> serde_json::Result<Value> {
        serde_json::to_value(self)
    }

    fn copied(&self) -> Box<dyn AnyArchitecture> {
        Box::new(self.clone())
    }

    fn build_dense(&self, params: &mut Scope<'_, Tensor>) -> Result<Box<dyn Model<Tensor>>> {
        Architecture::build(self, params)
    }

    fn build_sharded(&self, params: &mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>> {
        Architecture::build(self, params)
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        Architecture::check(self, fields)
    }

    fn unread(&self) -> Vec<String> {
        Architecture::unread(self)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        Architecture::count(self, count)
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        Architecture::largest_array(self, fields)
    }

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        Architecture::traffic(self, split)
    }

    fn sharding(&self) -> Sharding {
        Architecture::sharding(self)
    }

    fn signature(&self) -> Signature {
        Architecture::signature(self)
    }

    fn refinement(&self) -> usize {
        Architecture::refinement(self)
    }

    fn output_extents(&self, extents: &[usize]) -> Vec<usize> {
        Architecture::output_extents(self, extents)
    }

    fn denoises(&self) -> Option<Denoiser> {
        Architecture::denoises(self)
    }

    fn reads_patches(&self) -> bool {
        Architecture::reads_patches(self)
    }
}

/// Arrays that registered models are built for: `tch::Tensor` and `ShardTensor`.
pub trait ModelArray: Array + Parallel + sealed::Build {}

impl ModelArray for Tensor {}
impl ModelArray for ShardTensor {}

mod sealed {
    use super::*;

    pub trait Build: Array {
        #[expect(private_interfaces, reason = "no one outside this crate calls it")]
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>>;
    }

    #[expect(private_interfaces, reason = "no one outside this crate calls it")]
    impl Build for Tensor {
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>> {
            config.build_dense(params)
        }
    }

    #[expect(private_interfaces, reason = "no one outside this crate calls it")]
    impl Build for ShardTensor {
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>> {
            config.build_sharded(params)
        }
    }
}
