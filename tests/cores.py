"""Figures of two cores, as `dtrain doctor` may measure them."""

from typing import Any

from dtrain.cluster.measured import Figures


def figures(slower: float = 1.0, **other: Any) -> Figures:
    """Of cores that take `slower` times as long."""
    rates = {"product_fp32": 150e9, "product_bf16": 80e9, "convolution": 100e9, "attention": 60e9}
    each = {
        name: {
            way: [[size, rate * more * part / slower] for size, part in ((16, 0.01), (64, 0.3), (256, 1.0))]
            for way, more in (("alone", 1.0), ("whole", 1.8), ("together", 0.95))
        }
        for name, rate in rates.items()
    }
    for name in ("product_fp32", "product_bf16"):
        each[name] = {way: [[rows, table] for rows in (16, 64, 256)] for way, table in each[name].items()}
    streams = {
        name: {"alone": 3e10 / slower, "whole": 5e10 / slower, "together": 2.5e10 / slower}
        for name in ("pointwise", "update")
    }
    calls = {name: [[4096, 1e-4 * slower], [1 << 20, 1e-3 * slower], [1 << 24, 2e-2 * slower]]
             for name in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")}  # fmt: skip
    hosts = {"step": 3e-4, "operator": 5e-5, "copies": 1e-3, "shards": 5e-4, "tp": 5e-4, "pp": 1e-3, "byte": 1e-9}
    return {**each, **streams, **calls, **{name: value * slower for name, value in hosts.items()}, **other}
