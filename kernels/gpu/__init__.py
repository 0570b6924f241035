"""Triton kernels, one op per file: formula, shapes, kernel, launcher, configurations, float64 reference.

They import Triton when they are imported, which only an executor on a GPU does. Launchers take tensors and allocate
nothing; sizes that change while serving (batch, lengths, strides of the page table) are never compiled in, nor is the
alignment of index arrays, which may be parts of larger ones: a variant more is a second in which nothing is served.
Page ids and token indices become 64-bit right after they are loaded: their products pass 2**31 in large pools.
"""
