"""Predicts memory, collectives and time of a plan from the shapes of its model, by arithmetic on one rank of each
class: the cost does not depend on the number of ranks.
"""
