"""launcher=ray and data=ray: actors of a Ray cluster as nodes, and the rows of a Ray Dataset."""
