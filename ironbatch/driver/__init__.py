"""The driver seam: how a batch reaches a device by ioctl(2) and mmap(2), and a reference device that anyone can run.

`handle.DeviceHandle` is what the engine sees. `ioctl.IoctlDevice` is one on a device node, `software.SoftwareDevice`
one in the process; `node` serves the latter's device through /dev/fuse. The UAPI stands in `abi` and in the C header
`ironbatch_ioctl.h`; docs/driver.md describes it.
"""
