"""Compiled kernels: pure functions over flat memory.

A kernel takes base addresses, arrays and integers and returns an integer. It reads no clock, does no I/O and sees no
Python object, so that every one of them can be replayed and compared with a slow oracle.
"""
