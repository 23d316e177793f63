"""launcher=mpi and backend=mpi: nodes that mpirun starts, and a process group over MPI."""
