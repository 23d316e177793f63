"""Predicted memory, collectives and time of a plan, from the shapes of its model alone: by arithmetic, for one class of
ranks, whatever their number.
"""
