"""A study as a graph of models and measurements: resumable, compared, written as tables.

plan       a study file to nodes, cells and tables (tree has their types)
estimate   disk, tokens and missing inputs, before any work
tables     rows of a table, and how it is shown
work       calls that wait for each other, run by worker processes
cells      from requested measurements to work items
journal    finished cells on disk
summary    means and paired comparisons of the measurements
report     tables as text, files and one page; plots draws their figures
"""
