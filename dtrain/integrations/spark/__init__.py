"""launcher=spark, data=spark and `fit`: tasks of a barrier job as nodes, and the rows of a DataFrame."""
