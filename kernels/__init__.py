"""Numerical operations: one op per file with formula, shapes, kernel, launcher and reference."""
