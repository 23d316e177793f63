"""What a plan will hold, send and compute, from the shapes of its model alone: by arithmetic, for one class of ranks,
whatever their number.
"""
