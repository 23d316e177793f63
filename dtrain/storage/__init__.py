"""Bytes at URLs: one store for every fsspec scheme, the local disk, leases, and files of JSON lines."""
