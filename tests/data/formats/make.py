"""Makes the files of this folder with the reference writers of each format, for tests of the readers.

    pip install numpy h5py netCDF4 safetensors && python make.py

Every file holds the same trajectories, so that one test compares all: `u` and `v` of 3 trajectories, 5 frames, 4 x 6 points,
u[s, t, y, x] = 1000 s + 100 t + 10 y + x and v = -u / 2, and the static field `mask`[y, x] = 10 y + x.
"""
import h5py
import netCDF4
import numpy as np
from safetensors.numpy import save_file

s, t, y, x = np.meshgrid(*map(np.arange, (3, 5, 4, 6)), indexing="ij")
u = (1000 * s + 100 * t + 10 * y + x).astype("float32")
v = -u / 2
mask = u[0, 0]
time, lat, lon = np.arange(5) * 6.0, np.array([60.0, 20.0, -20.0, -60.0]), np.arange(6) * 60.0

np.save("u.npy", u)
np.savez("stored.npz", u=u, v=np.asfortranarray(v), mask=mask.astype("int16"))
np.savez_compressed("deflated.npz", u=u.astype(">f8"), v=v, mask=mask.astype("float16"))

with h5py.File("plain.h5", "w") as file:
    file.create_dataset("run/u", data=u, chunks=(1, 2, 4, 3), compression="gzip", shuffle=True)
    file.create_dataset("run/v", data=v.astype("float64"))
    file.create_dataset("mask", data=mask.astype("uint8"))
    file.create_dataset("grid/latitudes", data=lat)

with h5py.File("scales.h5", "w") as file:
    for name, values in [("sample", np.arange(3)), ("time", time), ("lat", lat), ("lon", lon)]:
        file[name] = values
        file[name].make_scale(name)
    for name, values, axes in [("u", u, ["sample", "time", "lat", "lon"]), ("v", v, ["sample", "time", "lat", "lon"]),
                               ("mask", mask, ["lat", "lon"])]:
        file[name] = values
        for at, axis in enumerate(axes):
            file[name].dims[at].attach_scale(file[axis])


def coordinates(file):
    for dim, values, unit in [("time", time, "hours since 2000-01-01"), ("lat", lat, "degrees_north"),
                              ("lon", lon, "degrees_east")]:
        variable = file.createVariable(dim, "f8", (dim,))
        variable.units, variable[:] = unit, values


def netcdf(name, kind, unlimited, coordinates_first=True):
    with netCDF4.Dataset(name, "w", format=kind) as file:
        for dim, size in [("time", 5), ("sample", 3), ("lat", 4), ("lon", 6)]:
            file.createDimension(dim, None if unlimited and dim == "time" else size)
        if coordinates_first:
            coordinates(file)
        variable = file.createVariable("u", "f4", ("time", "sample", "lat", "lon"), fill_value=np.float32(-9999))
        variable.units, variable[:] = "m s-1", u.transpose(1, 0, 2, 3)
        # Packed in 16 bits: half a unit a step.
        variable = file.createVariable("v", "i2", ("time", "sample", "lat", "lon"), fill_value=np.int16(-32768))
        variable.scale_factor, variable.add_offset = np.float32(0.5), np.float32(-1.0)
        variable[:] = v.transpose(1, 0, 2, 3)
        file.createVariable("mask", "f4", ("lat", "lon"))[:] = mask
        file.createVariable("label", "S1", ("lat",))[:] = np.array(list("abcd"), "S1")
        if unlimited:
            file.createVariable("note", "S1", ("time",))[:] = np.array(list("abcde"), "S1")
        if not coordinates_first:
            coordinates(file)


netcdf("classic.nc", "NETCDF3_CLASSIC", True)
netcdf("offset64.nc", "NETCDF3_64BIT_OFFSET", False)
netcdf("data64.nc", "NETCDF3_64BIT_DATA", True)
netcdf("netcdf4.nc", "NETCDF4", True)
# As xarray writes: netCDF numbers the dimensions on data variables, too.
netcdf("variables_first.nc", "NETCDF4", True, coordinates_first=False)

# A missing value in the third frame of v.
with netCDF4.Dataset("missing.nc", "w", format="NETCDF3_CLASSIC") as file:
    for dim, size in [("time", 4), ("x", 3)]:
        file.createDimension(dim, size)
    values = np.ma.masked_equal(np.where(np.arange(12) == 7, -1, np.arange(12)), -1).reshape(4, 3)
    file.createVariable("v", "f4", ("time", "x"), fill_value=np.float32(-9999))[:] = values

save_file({"u": u, "v": v.astype("float64"), "mask": mask.astype("float16")}, "arrays.safetensors")
