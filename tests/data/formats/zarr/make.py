"""Makes the stores in this folder with zarr-python and xarray: python3 make.py

Every array is of shape (5, 6, 7) and holds 100 t + 10 y + x + 0.25, unless said otherwise. Made with zarr 3.x and xarray 2026.x.
"""

import pathlib
import shutil

import numpy as np
import xarray as xr
import zarr
from numcodecs import GZip, Zlib, Zstd, Blosc
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

here = pathlib.Path(__file__).parent
t, y, x = np.meshgrid(np.arange(5), np.arange(6), np.arange(7), indexing="ij")
values = (100 * t + 10 * y + x + 0.25).astype("f4")
dims = ("time", "y", "x")


def fresh(name):
    path = here / name
    shutil.rmtree(path, ignore_errors=True)
    return path


zarr.config.set({"array.write_empty_chunks": True})

# Version 2, plain.
group = zarr.open_group(fresh("v2.zarr"), mode="w", zarr_format=2)
for name, dtype, compressor, order in [
    ("big", ">f4", None, "C"),
    ("big_blosc", ">f8", Blosc("lz4", 5, Blosc.SHUFFLE), "C"),
    ("zlib", "<f4", Zlib(5), "C"),
    ("gzip", "<f4", GZip(5), "F"),
    ("zstd", "<f4", Zstd(3), "C"),
    ("blosc", "<f4", Blosc("zstd", 3, Blosc.BITSHUFFLE), "F"),
]:
    array = group.create_array(
        name, shape=(5, 6, 7), chunks=(3, 4, 4), dtype=dtype, compressors=compressor, order=order, fill_value=0
    )
    array[:] = values
    array.attrs["_ARRAY_DIMENSIONS"] = list(dims)

# Version 3, plain, with groups in groups.
group = zarr.open_group(fresh("v3.zarr"), mode="w", zarr_format=3)
inner = group.create_group("deep").create_group("er")
for where, name, options in [
    (group, "raw", {"compressors": None}),
    (group, "big", {"compressors": None, "serializer": BytesCodec(endian="big")}),
    (group, "blosc", {"compressors": BloscCodec(cname="lz4", clevel=5, typesize=4)}),
    (group, "gzip_crc", {"compressors": [GzipCodec(level=5), Crc32cCodec()]}),
    (group, "transposed", {"filters": [TransposeCodec(order=(2, 0, 1))], "compressors": ZstdCodec(level=3)}),
    (inner, "zstd", {"compressors": ZstdCodec(level=3, checksum=True)}),
    (group, "sharded", {"shards": (6, 4, 4), "compressors": ZstdCodec(level=3)}),
    (group, "sharded_raw", {"shards": (6, 4, 4), "compressors": None}),
    (group, "sharded_blosc", {"shards": (3, 6, 8), "compressors": BloscCodec(cname="zstd", clevel=3, typesize=4)}),
]:
    array = where.create_array(
        name, shape=(5, 6, 7), chunks=(3, 2, 2) if "shards" in options else (3, 4, 4), dtype="f4", fill_value=np.nan, dimension_names=dims, **options
    )
    array[:] = values

# What xarray writes: packed, with fill values, times, consolidated.
packed = np.where(x == 6, np.nan, 100 * t + 10 * y + x).astype("f8")
data = xr.Dataset(
    {"u": (dims, values, {"units": "m s-1"}), "packed": (dims, packed, {"units": "K"})},
    coords={
        "time": (("time",), np.datetime64("2000-01-01", "ns") + np.arange(5) * np.timedelta64(6, "h")),
        "y": (("y",), np.linspace(75.0, -75.0, 6), {"units": "degrees_north"}),
        "x": (("x",), np.arange(7) * 360 / 7, {"units": "degrees_east"}),
    },
)
for version in (2, 3):
    encoding = {
        "packed": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 100.0, "_FillValue": -999, "chunks": (3, 6, 7)},
        "u": {"_FillValue": 1e20, "chunks": (3, 4, 4)},
        "time": {"units": "hours since 2000-01-01", "calendar": "proleptic_gregorian", "dtype": "i8"},
    }
    path = fresh(f"xarray_v{version}.zarr")
    data.to_zarr(path, zarr_format=version, consolidated=True, encoding=encoding)

# Chunks of the fill value alone are left out.
zarr.config.set({"array.write_empty_chunks": False})
group = zarr.open_group(fresh("sparse.zarr"), mode="w", zarr_format=3)
zeros = np.where(t < 3, 0, values).astype("f4")
for name, shards in [("plain", None), ("sharded", (6, 4, 4))]:
    array = group.create_array(
        name, shape=(5, 6, 7), chunks=(3, 2, 2), shards=shards, dtype="f4", fill_value=0, dimension_names=dims
    )
    array[:] = zeros
