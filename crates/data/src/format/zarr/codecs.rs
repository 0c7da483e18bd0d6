//! From the bytes of a chunk to its values, in memory of a size that is known before.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::Read;
use std::num::NonZeroU64;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use flate2::read::{MultiGzDecoder, ZlibDecoder};
use serde_json::Value;
use zarrs::array::codec::{
    BloscCodec, BytesCodec, Crc32cCodec, FixedScaleOffsetCodec, GzipCodec, ShardingCodec, ShuffleCodec,
    TransposeCodec, ZlibCodec, ZstdCodec,
};
use zarrs::array::{
    ArrayBytes, ArrayToBytesCodecTraits as _, BytesRepresentation, BytesToBytesCodecTraits, CodecChain,
    CodecMetadataOptions, CodecOptions, DataType, FillValue, data_type,
};
use zarrs::metadata::v3::MetadataV3;
use zstd::bulk::Decompressor;

use super::store::{Span, Store, short};
use crate::boxes::{copy, extents, indices, shared, touched};
use crate::spare::{buffer, keep};

/// Largest chunk that is unpacked, in bytes, and of shards the largest of their inner chunks.
pub(super) const LARGEST: usize = 1 << 30;
/// Most inner chunks of a shard.
const MOST_INNER: usize = 1 << 22;
/// Deepest shards in shards.
const DEEPEST: usize = 3;
/// Bytes that codecs may add to what they cannot pack.
const ADDED: usize = 1 << 16;

/// Reason why a chunk cannot be read.
#[derive(Debug)]
pub(super) enum Failure {
    /// It is not there.
    Missing,
    /// The system refused.
    Io(std::io::Error),
    /// It is damaged, or of a kind that is not read.
    Wrong(String),
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

type Outcome<T> = Result<T, Failure>;

/// A chunk of a store, and the values in it.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) key: &'a str,
    pub(super) values: &'a Numbers,
}

/// The values of an array.
#[derive(Debug)]
pub(super) struct Numbers {
    pub(super) kind: DataType,
    pub(super) fill: FillValue,
    /// Bytes of a value.
    pub(super) size: usize,
    /// True if the fill value stands for chunks that are missing.
    pub(super) fills: bool,
}

/// The way from bytes to values of chunks of one shape.
#[derive(Debug)]
pub(super) struct Plan {
    shape: Vec<usize>,
    /// Bytes of an unpacked chunk, at most.
    bytes: usize,
    packed: Vec<Arc<dyn BytesToBytesCodecTraits>>,
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    /// The bytes are the values, in this machine's order.
    Raw,
    /// Values in another order.
    Ordered(Box<CodecChain>),
    Shard(Box<Shard>),
}

/// Inner chunks one after the other, and an index of them.
#[derive(Debug)]
struct Shard {
    plan: Plan,
    /// Inner chunks along each axis.
    grid: Vec<usize>,
    index: CodecChain,
    index_bytes: u64,
    at_end: bool,
}

/// Place of the bytes of a chunk.
enum Source {
    /// In the store: all bytes of the key, or some.
    Stored(Option<(u64, u64)>),
    Memory(Vec<u8>),
}

impl Plan {
    /// Plans how chunks of this shape are read.
    ///
    /// # Errors
    /// Codecs whose memory cannot be bounded, or that do not fit together; chunks that are too large.
    pub(super) fn new(chain: &CodecChain, shape: &[usize], size: usize) -> Result<Self, String> {
        Self::nested(chain, shape, size, 0)
    }

    fn nested(chain: &CodecChain, shape: &[usize], size: usize, depth: usize) -> Result<Self, String> {
        for codec in chain.array_to_array_codecs() {
            let any = codec.as_any();
            if !(any.is::<TransposeCodec>() || any.is::<FixedScaleOffsetCodec>()) {
                return Err(format!("filtered by a codec that is not read ({})", names(chain)));
            }
        }
        let packed = chain.bytes_to_bytes_codecs().to_vec();
        for codec in &packed {
            let any = codec.as_any();
            let is_known = is_packing(&**codec) || any.is::<Crc32cCodec>() || any.is::<ShuffleCodec>();
            if !is_known {
                return Err(format!("packed by a codec that is not read ({})", names(chain)));
            }
        }
        let is_plain = chain.array_to_array_codecs().is_empty();
        let coder = chain.array_to_bytes_codec();
        if coder.as_any().is::<ShardingCodec>() {
            if !is_plain || depth == DEEPEST {
                return Err(format!("sharded in a way that is not read ({})", names(chain)));
            }
            let shard = Shard::new(&configuration(chain, "sharding_indexed")?, shape, size, depth)?;
            // Of a shard that is packed as a whole all bytes are unpacked.
            let bytes = if packed.is_empty() { 0 } else { bounded(shape, size)?.saturating_add(ADDED) };
            return Ok(Self { shape: shape.to_vec(), bytes, packed, inner: Inner::Shard(Box::new(shard)) });
        }
        if !coder.as_any().is::<BytesCodec>() {
            return Err(format!("stored by a codec that is not read ({})", names(chain)));
        }
        // Scaled values may be stored in more bytes.
        let is_scaled =
            chain.array_to_array_codecs().iter().any(|codec| codec.as_any().is::<FixedScaleOffsetCodec>());
        let bytes = bounded(shape, if is_scaled { 8 } else { size })?;
        let order = configuration(chain, "bytes")?.get("endian").and_then(Value::as_str).map(str::to_owned);
        let own = if cfg!(target_endian = "big") { "big" } else { "little" };
        let is_raw = is_plain && (size == 1 || order.as_deref() == Some(own));
        let inner = match is_raw {
            true => Inner::Raw,
            false => Inner::Ordered(Box::new(CodecChain::new(
                chain.array_to_array_codecs().to_vec(),
                Arc::clone(coder),
                Vec::new(),
            ))),
        };
        Ok(Self { shape: shape.to_vec(), bytes, packed, inner })
    }

    /// Reads a window of a chunk that is not empty: the bytes of its values in C order.
    pub(super) fn read(&self, place: &Place<'_>, window: &[Range<usize>]) -> Outcome<Vec<u8>> {
        self.unpack(place, Source::Stored(None), window)
    }

    /// Extents of the pieces that are read one by one.
    pub(super) fn piece(&self) -> &[usize] {
        match &self.inner {
            Inner::Shard(shard) => shard.plan.piece(),
            _ => &self.shape,
        }
    }

    fn unpack(&self, place: &Place<'_>, mut source: Source, window: &[Range<usize>]) -> Outcome<Vec<u8>> {
        let size = place.values.size;
        if !self.packed.is_empty() {
            let most = self.bytes.saturating_add(self.bytes / 8).saturating_add(ADDED);
            let mut bytes = source.all(place, most as u64)?;
            for (at, codec) in self.packed.iter().enumerate().rev() {
                // What the codecs before this one may have added.
                let limit = self.bytes + if at > 0 { self.bytes / 8 + ADDED } else { 0 };
                bytes = unpack(&**codec, bytes, limit)?;
            }
            source = Source::Memory(bytes);
        }
        let whole = extents(window) == self.shape;
        let bytes = match &self.inner {
            Inner::Shard(shard) => return shard.read(place, &source, window),
            Inner::Raw if matches!(source, Source::Stored(_)) && !whole => {
                return raw(place, &source, (&self.shape, self.bytes as u64), window);
            }
            Inner::Raw => source.all(place, self.bytes as u64)?,
            Inner::Ordered(chain) => {
                let bytes = source.all(place, self.bytes as u64)?;
                let Numbers { kind, fill, .. } = place.values;
                let shape = nonzero(&self.shape)?;
                let options = CodecOptions::default();
                quietly(|| {
                    let values = chain.decode(Cow::Owned(bytes), &shape, kind, fill, &options);
                    let values = values.map_err(|error| error.to_string())?;
                    let values = values.into_fixed().map_err(|error| error.to_string())?;
                    Ok(values.into_owned())
                })?
            }
        };
        let expected = self.shape.iter().product::<usize>() * size;
        if bytes.len() != expected {
            return Err(Failure::Wrong(format!("of {} bytes, unpacked, expected {expected}", bytes.len())));
        }
        if whole {
            return Ok(bytes);
        }
        let cut = extents(window);
        let all: Vec<Range<usize>> = cut.iter().map(|&extent| 0..extent).collect();
        let mut out = buffer(cut.iter().product::<usize>() * size)?;
        copy(size, (&bytes, &self.shape, window), (&mut out, &cut, &all));
        keep(bytes);
        Ok(out)
    }
}

/// Reads a window of a chunk whose bytes are its values: from the first to the last of them, not the whole chunk.
fn raw(
    place: &Place<'_>,
    source: &Source,
    (shape, bytes): (&[usize], u64),
    window: &[Range<usize>],
) -> Outcome<Vec<u8>> {
    let size = place.values.size;
    let there = source.length(place)?;
    if there != bytes {
        return Err(Failure::Wrong(format!("of {there} bytes, expected {bytes}")));
    }
    let flat = |pick: fn(&Range<usize>) -> usize| {
        window.iter().zip(shape).fold(0, |at, (range, &extent)| at * extent + pick(range))
    };
    let (first, last) = (flat(|range| range.start), flat(|range| range.end - 1));
    let bytes = source.part(place, (first * size) as u64, ((last + 1 - first) * size) as u64)?;
    let cut = extents(window);
    let mut out = buffer(cut.iter().product::<usize>() * size)?;
    let all: Vec<Range<usize>> = cut.iter().map(|&extent| 0..extent).collect();
    let found = crate::runs::runs(shape, window);
    let target = crate::runs::runs(&cut, &all);
    debug_assert_eq!(target.starts.len(), 1);
    for (piece, start) in out.chunks_exact_mut(found.length * size).zip(found.starts) {
        let at = (start as usize - first) * size;
        piece.copy_from_slice(&bytes[at..at + piece.len()]);
    }
    Ok(out)
}

impl Shard {
    fn new(table: &Value, shape: &[usize], size: usize, depth: usize) -> Result<Self, String> {
        let wrong = |what: &str| format!("sharded, but {what}");
        let chunk = table
            .get("chunk_shape")
            .and_then(Value::as_array)
            .ok_or_else(|| wrong("without inner chunks"))?;
        let chunk: Option<Vec<usize>> = chunk
            .iter()
            .map(|extent| usize::try_from(extent.as_u64()?).ok().filter(|&extent| extent > 0))
            .collect();
        let chunk = chunk.filter(|chunk| chunk.len() == shape.len());
        let chunk = chunk.ok_or_else(|| wrong("in inner chunks of other dims"))?;
        if shape.iter().zip(&chunk).any(|(shape, chunk)| shape % chunk != 0) {
            return Err(wrong(&format!("in inner chunks of shape {chunk:?}, which do not divide {shape:?}")));
        }
        let grid: Vec<usize> = shape.iter().zip(&chunk).map(|(shape, chunk)| shape / chunk).collect();
        let count = grid.iter().try_fold(1_usize, |count, &extent| count.checked_mul(extent));
        let Some(count) = count.filter(|&count| count <= MOST_INNER) else {
            return Err(wrong(&format!("in {grid:?} inner chunks, expected at most {MOST_INNER}")));
        };
        let inner = Self::chain(table, "codecs")?;
        let index = Self::chain(table, "index_codecs")?;
        let sums = index.bytes_to_bytes_codecs();
        let fixed = index.array_to_array_codecs().is_empty()
            && index.array_to_bytes_codec().as_any().is::<BytesCodec>()
            && sums.iter().all(|codec| codec.as_any().is::<Crc32cCodec>());
        if !fixed {
            return Err(wrong(&format!(
                "with an index of another size than its entries ({})",
                names(&index)
            )));
        }
        let plan = Plan::nested(&inner, &chunk, size, depth + 1)?;
        let index_bytes = (count * 16 + sums.len() * 4) as u64;
        let at_end = table.get("index_location").and_then(Value::as_str) != Some("start");
        Ok(Self { plan, grid, index, index_bytes, at_end })
    }

    fn chain(table: &Value, name: &str) -> Result<CodecChain, String> {
        let codecs = table.get(name).cloned().unwrap_or_default();
        let codecs: Vec<MetadataV3> = serde_json::from_value(codecs).map_err(|error| error.to_string())?;
        CodecChain::from_metadata(&codecs).map_err(|error| error.to_string())
    }

    fn read(&self, place: &Place<'_>, source: &Source, window: &[Range<usize>]) -> Outcome<Vec<u8>> {
        let index = match self.at_end {
            true => source.last(place, self.index_bytes)?,
            false => source.part(place, 0, self.index_bytes)?,
        };
        let shape: Vec<usize> = self.grid.iter().copied().chain([2]).collect();
        let shape = nonzero(&shape)?;
        let (kind, fill) = (data_type::uint64(), FillValue::from(u64::MAX));
        let options = CodecOptions::default();
        let index = quietly(|| {
            let index: ArrayBytes<'_> =
                (self.index.decode(Cow::Owned(index), &shape, &kind, &fill, &options))
                    .map_err(|error| format!("with an index that is damaged: {error}"))?;
            Ok(index.into_fixed().map_err(|error| error.to_string())?.into_owned())
        })?;
        let entries = index.as_chunks::<16>().0;
        let (cut, size) = (extents(window), place.values.size);
        let mut out = buffer(cut.iter().product::<usize>() * size)?;
        for inner in indices(&touched(window, &self.plan.shape)) {
            let (inside, outside) = shared(window, &self.plan.shape, &inner);
            let at = inner.iter().zip(&self.grid).fold(0, |at, (index, extent)| at * extent + index);
            let Some(entry) = entries.get(at) else {
                return Err(Failure::Wrong("with an index that is cut off".to_owned()));
            };
            let [first, length] = [0, 8].map(|at| {
                let mut number = [0; 8];
                number.copy_from_slice(&entry[at..at + 8]);
                u64::from_ne_bytes(number)
            });
            let part = extents(&inside);
            let all: Vec<Range<usize>> = part.iter().map(|&extent| 0..extent).collect();
            let values = if (first, length) == (u64::MAX, u64::MAX) {
                place.filled(&part)?
            } else {
                self.plan.unpack(place, source.inner(place, first, length)?, &inside)?
            };
            copy(size, (&values, &part, &all), (&mut out, &cut, &outside));
            keep(values);
        }
        Ok(out)
    }
}

impl Place<'_> {
    /// Fill values of these extents, if they stand for what is missing.
    pub(super) fn filled(&self, shape: &[usize]) -> Outcome<Vec<u8>> {
        let Numbers { fill, size, fills, .. } = self.values;
        if !fills || fill.as_ne_bytes().len() != *size {
            return Err(Failure::Missing);
        }
        let mut bytes = buffer(shape.iter().product::<usize>() * size)?;
        bytes.chunks_exact_mut(*size).for_each(|value| value.copy_from_slice(fill.as_ne_bytes()));
        Ok(bytes)
    }
}

impl Source {
    fn all(self, place: &Place<'_>, limit: u64) -> Outcome<Vec<u8>> {
        match self {
            Self::Memory(bytes) => Ok(bytes),
            Self::Stored(None) => place.store.read(place.key, Span::All(limit))?.ok_or(Failure::Missing),
            Self::Stored(Some((first, length))) if length <= limit => {
                place.store.read(place.key, Span::Some(first, length))?.ok_or(Failure::Missing)
            }
            Self::Stored(Some((_, length))) => Err(Failure::Wrong(format!(
                "with {length} bytes of an inner chunk, expected at most {limit}"
            ))),
        }
    }

    fn length(&self, place: &Place<'_>) -> Outcome<u64> {
        match self {
            Self::Memory(bytes) => Ok(bytes.len() as u64),
            Self::Stored(Some((_, length))) => Ok(*length),
            Self::Stored(None) => place.store.length(place.key)?.ok_or(Failure::Missing),
        }
    }

    fn part(&self, place: &Place<'_>, first: u64, length: u64) -> Outcome<Vec<u8>> {
        match self {
            Self::Memory(bytes) => {
                let end = first.checked_add(length).filter(|&end| end <= bytes.len() as u64);
                let end = end.ok_or_else(|| short(bytes.len() as u64, first.saturating_add(length)))?;
                Ok(bytes[first as usize..end as usize].to_vec())
            }
            Self::Stored(within) => {
                let first = match within {
                    None => first,
                    Some((start, all)) => {
                        let end = first.checked_add(length).filter(|end| end <= all);
                        let end = end.and_then(|end| start.checked_add(end));
                        end.ok_or_else(|| short(*all, first.saturating_add(length)))? - length
                    }
                };
                place.store.read(place.key, Span::Some(first, length))?.ok_or(Failure::Missing)
            }
        }
    }

    fn last(&self, place: &Place<'_>, length: u64) -> Outcome<Vec<u8>> {
        match self {
            Self::Stored(None) => place.store.read(place.key, Span::Last(length))?.ok_or(Failure::Missing),
            _ => {
                let all = self.length(place)?;
                let first = all.checked_sub(length).ok_or_else(|| short(all, length))?;
                self.part(place, first, length)
            }
        }
    }

    /// The bytes of an inner chunk.
    fn inner(&self, place: &Place<'_>, first: u64, length: u64) -> Outcome<Self> {
        match self {
            Self::Stored(None) => Ok(Self::Stored(Some((first, length)))),
            Self::Memory(_) => Ok(Self::Memory(self.part(place, first, length)?)),
            Self::Stored(Some((start, all))) => {
                let end = first.checked_add(length).filter(|end| end <= all);
                let start = end.and_then(|_| start.checked_add(first));
                let start = start.ok_or_else(|| short(*all, first.saturating_add(length)))?;
                Ok(Self::Stored(Some((start, length))))
            }
        }
    }
}

/// Returns whether a codec makes fewer bytes of more.
fn is_packing(codec: &dyn BytesToBytesCodecTraits) -> bool {
    let any = codec.as_any();
    any.is::<GzipCodec>() || any.is::<ZlibCodec>() || any.is::<ZstdCodec>() || any.is::<BloscCodec>()
}

thread_local! {
    /// One for all chunks of a thread: to make one takes time.
    static ZSTD: RefCell<Decompressor<'static>> = RefCell::default();
}

/// Unpacks bytes into at most `limit`.
fn unpack(codec: &dyn BytesToBytesCodecTraits, bytes: Vec<u8>, limit: usize) -> Outcome<Vec<u8>> {
    let too_many = || Failure::Wrong(format!("of more than {limit} bytes, unpacked"));
    let stream = |reader: &mut dyn Read| -> Outcome<Vec<u8>> {
        let mut out = Vec::new();
        let damaged = |error| Failure::Wrong(format!("damaged: {error}"));
        reader.take(limit as u64 + 1).read_to_end(&mut out).map_err(damaged)?;
        if out.len() > limit { Err(too_many()) } else { Ok(out) }
    };
    let any = codec.as_any();
    if any.is::<GzipCodec>() {
        return stream(&mut MultiGzDecoder::new(&bytes[..]));
    }
    if any.is::<ZlibCodec>() {
        return stream(&mut ZlibDecoder::new(&bytes[..]));
    }
    if any.is::<ZstdCodec>() {
        // A frame that says how much it holds is unpacked at once.
        let promised = zstd::zstd_safe::get_frame_content_size(&bytes);
        return match promised {
            Ok(Some(promised)) if promised > limit as u64 => Err(too_many()),
            Ok(Some(_)) => {
                let mut out = buffer(limit)?;
                let made = ZSTD.with_borrow_mut(|zstd| zstd.decompress_to_buffer(&bytes, &mut out));
                keep(bytes);
                match made {
                    Ok(made) if made > limit => Err(too_many()),
                    Ok(_) => Ok(out),
                    Err(error) => Err(Failure::Wrong(format!("damaged: {error}"))),
                }
            }
            _ => stream(&mut zstd::stream::read::Decoder::with_buffer(&bytes[..])?),
        };
    }
    if any.is::<BloscCodec>() {
        // The header: four numbers of one byte, then the unpacked bytes, a block, and the packed bytes.
        let number = |at: usize| {
            let number = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes([number[0], number[1], number[2], number[3]]) as usize)
        };
        match (number(4), number(12)) {
            (Some(unpacked), Some(packed)) if packed == bytes.len() => {
                if unpacked > limit {
                    return Err(too_many());
                }
            }
            _ => return Err(Failure::Wrong("damaged: its header of blosc is wrong".to_owned())),
        }
    }
    quietly(|| {
        let options = CodecOptions::default();
        let made = codec.decode(Cow::Owned(bytes), &BytesRepresentation::BoundedSize(limit as u64), &options);
        Ok(made.map_err(|error| format!("damaged: {error}"))?.into_owned())
    })
}

/// Calls codecs, which may panic on what is damaged.
pub(super) fn quietly<T>(call: impl FnOnce() -> Result<T, String>) -> Outcome<T> {
    let outcome = catch_unwind(AssertUnwindSafe(call));
    outcome.unwrap_or_else(|_| Err("damaged: its codec failed".to_owned())).map_err(Failure::Wrong)
}

/// Bytes of a chunk of this shape, if they are few enough.
fn bounded(shape: &[usize], size: usize) -> Result<usize, String> {
    let bytes = shape.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent));
    bytes
        .filter(|&bytes| bytes <= LARGEST)
        .ok_or_else(|| format!("in chunks of shape {shape:?}, which are larger than {LARGEST} bytes"))
}

fn nonzero(shape: &[usize]) -> Outcome<Vec<NonZeroU64>> {
    let shape: Option<Vec<NonZeroU64>> = shape.iter().map(|&extent| NonZeroU64::new(extent as u64)).collect();
    shape.ok_or_else(|| Failure::Wrong("in chunks of extent 0".to_owned()))
}

/// The configuration of a codec of a chain.
fn configuration(chain: &CodecChain, name: &str) -> Result<Value, String> {
    let all = serde_json::to_value(chain.create_metadatas(&CodecMetadataOptions::default()));
    let all = all.map_err(|error| error.to_string())?;
    let own = all
        .as_array()
        .into_iter()
        .flatten()
        .find(|codec| codec.get("name").and_then(Value::as_str) == Some(name));
    Ok(own.and_then(|codec| codec.get("configuration")).cloned().unwrap_or_default())
}

/// The codecs of a chain, for messages.
fn names(chain: &CodecChain) -> String {
    let all =
        serde_json::to_value(chain.create_metadatas(&CodecMetadataOptions::default())).unwrap_or_default();
    let name = |codec: &Value| {
        let name = codec.get("name").unwrap_or(codec).as_str();
        name.unwrap_or("?").chars().filter(|letter| !letter.is_control()).collect::<String>()
    };
    let names: Vec<String> = all.as_array().into_iter().flatten().map(name).collect();
    names.join(", ")
}
