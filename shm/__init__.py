"""Shared-memory rings, doorbells and channels between processes."""
