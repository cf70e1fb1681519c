"""Grading a class: submissions are data, learners' code runs in a box, comparison happens here."""
