"""`dtrain evaluate tasks=...`: the benchmarks of lm_eval, answered by a checkpoint on any mesh."""
