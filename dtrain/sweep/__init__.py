"""A sweep: many runs of one space, in one folder, worked on by any number of processes."""
