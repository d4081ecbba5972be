"""A study as a graph of models and measurements: resumable, compared, written as tables.

plan       a study file to nodes, cells and tables (tree has their types)
estimate   disk, tokens and missing inputs, before any work
tables     rows of a table, and how it is shown
work       calls that wait for each other, run by worker processes
cells      finished cells on disk, and work items for missing ones
summary    means and paired comparisons of the measurements
report     tables as text, files and one page; plots draws their figures
"""
