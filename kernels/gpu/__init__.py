"""Triton kernels, one op per file: formula, shapes, kernel, launcher, configurations, float64 reference.

They import Triton when they are imported, which only an executor on a GPU does. Launchers take tensors and allocate
nothing; sizes that change while serving (batch, lengths, strides of the page table) are never compiled in. Page ids and
token indices become 64-bit right after they are loaded, since their products pass 2**31 in large pools.
"""
