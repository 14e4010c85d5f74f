"""The driver seam: how a batch reaches a device node by ioctl(2) and mmap(2). Its modules are still to come."""
