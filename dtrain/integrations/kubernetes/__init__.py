"""launcher=kubernetes: a job whose pods are the nodes, from its manifest to the end of its pods."""
