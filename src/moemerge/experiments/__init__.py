"""A study as a tree of models and measurements: resumable, compared, written down.

tables     rows of a table, and how it is shown
work       calls that wait for each other, run by worker processes
cells      from wanted measurements to work items
journal    finished cells on disk
summary    means and paired comparisons of what was measured
report     tables as text, files and one page; plots draws their figures
"""
