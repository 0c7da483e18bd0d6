//! Data that every rank can reproduce, in every kind and in every order of memory.

use tch::{Device, Kind, Tensor};

use super::Suite;

/// Every kind that must travel.
pub(crate) const KINDS: [Kind; 12] = [
    Kind::Half,
    Kind::BFloat16,
    Kind::Float,
    Kind::Double,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
];

/// Memory formats of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Contiguous,
    /// Its dims in reverse order.
    Transposed,
    /// Every second element along the last dim of a larger tensor.
    Strided,
    /// In the middle of a larger tensor along the first and the last dim.
    Window,
    /// One value along the first dim, all strides of it zero. Changes the values.
    Expanded,
    /// Dim 1 innermost; as it is where there are not 4 or 5 dims.
    ChannelsLast,
    /// The conjugate not yet taken, of complex tensors; contiguous for others. Changes the values.
    Conjugated,
}

pub(crate) const MEMORIES: [Memory; 7] = [
    Memory::Contiguous,
    Memory::Transposed,
    Memory::Strided,
    Memory::Window,
    Memory::Expanded,
    Memory::ChannelsLast,
    Memory::Conjugated,
];

impl Suite<'_> {
    /// A number for data that all ranks number alike.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.next += 1;
        mix(self.seed ^ mix(self.next))
    }

    /// The tensor number `id` of a rank.
    pub(crate) fn data(&self, id: u64, rank: usize, shape: &[i64], kind: Kind) -> Tensor {
        let name = self.case.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
        data(mix(name ^ id) ^ mix(rank as u64 + 1), shape, kind)
    }
}

/// Values in ±2 that have no short binary form, integers in ±8, booleans.
pub(crate) fn data(seed: u64, shape: &[i64], kind: Kind) -> Tensor {
    let count: i64 = shape.iter().product();
    let values = |seed: u64| -> Vec<f64> {
        let unit = |i: i64| (mix(seed ^ mix(i as u64)) >> 11) as f64 / (1_u64 << 53) as f64;
        (0..count).map(|i| unit(i) * 4.0 - 2.0).collect()
    };
    let real = |seed: u64| Tensor::from_slice(&values(seed)).view(shape);
    match kind {
        Kind::ComplexFloat | Kind::ComplexDouble => {
            Tensor::complex(&real(seed), &real(mix(seed))).to_kind(kind)
        }
        Kind::Bool => real(seed).gt(0.0),
        Kind::Uint8 => (real(seed).abs() * 4.0).to_kind(kind),
        Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64 => (real(seed) * 4.0).round().to_kind(kind),
        _ => real(seed).to_kind(kind),
    }
}

/// The tensor laid out in memory as `memory` says: the same values where that says nothing else.
pub(crate) fn laid_out(tensor: &Tensor, memory: Memory) -> Tensor {
    let shape = tensor.size();
    let dims = shape.len() as i64;
    if dims == 0 {
        return tensor.shallow_clone();
    }
    let copy_into = |place: Tensor| {
        place.shallow_clone().copy_(tensor);
        place
    };
    let larger = |shape: Vec<i64>| Tensor::zeros(shape, (tensor.kind(), Device::Cpu));
    let (first, last) = (0, dims - 1);
    match memory {
        Memory::Contiguous => tensor.shallow_clone(),
        Memory::Transposed => {
            let reversed: Vec<i64> = (0..dims).rev().collect();
            tensor.permute(&reversed).contiguous().permute(&reversed)
        }
        Memory::Strided => {
            let mut shape = shape.clone();
            shape[last as usize] *= 2;
            let length = shape[last as usize];
            copy_into(larger(shape).slice(last, 0, length, 2))
        }
        Memory::Window => {
            let mut larger_shape = shape.clone();
            larger_shape[first as usize] += 3;
            larger_shape[last as usize] += 2;
            let place = larger(larger_shape).narrow(first, 2, shape[0]);
            copy_into(place.narrow(last, 1, shape[last as usize]))
        }
        Memory::Expanded if shape[0] > 0 => tensor.narrow(0, 0, 1).expand(&shape, false),
        Memory::Expanded => tensor.shallow_clone(),
        Memory::ChannelsLast if (4..=5).contains(&dims) => {
            let mut order: Vec<i64> = (0..dims).filter(|&d| d != 1).collect();
            order.push(1);
            let mut back: Vec<i64> = (0..dims - 1).collect();
            back.insert(1, dims - 1);
            tensor.permute(&order).contiguous().permute(&back)
        }
        Memory::ChannelsLast => tensor.shallow_clone(),
        Memory::Conjugated => tensor.conj(),
    }
}

/// Returns whether a tensor of 4 or 5 dims is stored channels-last, and not in row-major order.
pub(crate) fn is_channels_last(tensor: &Tensor) -> bool {
    let dims = tensor.dim() as i64;
    let mut order: Vec<i64> = (0..dims).filter(|&d| d != 1).collect();
    order.push(1);
    (4..=5).contains(&dims) && !tensor.is_contiguous() && tensor.permute(&order).is_contiguous()
}

/// Ways to split an extent over ranks: equal parts, growing ones, an empty one in the middle, all at the first.
pub(crate) fn splits(ranks: usize) -> [Vec<i64>; 4] {
    let ranks_i64 = ranks as i64;
    [
        vec![2; ranks],
        (1..=ranks_i64).collect(),
        (0..ranks).map(|r| if r == ranks / 2 { 0 } else { 3 - (r as i64 % 2) }).collect(),
        (0..ranks).map(|r| if r == 0 { 4 } else { 0 }).collect(),
    ]
}

/// Returns the same index tensor for each of `count` ranks.
pub(crate) fn repeated(rows: &[i64], count: usize) -> Vec<Tensor> {
    (0..count).map(|_| Tensor::from_slice(rows)).collect()
}

/// SplitMix64's output function.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
