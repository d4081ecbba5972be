"""A sandbox for programs that models wrote.

`process` starts and ends the confined process. `inside` runs in it, and confines itself with
`system` before it runs a program. Nothing is imported here, because the confined process starts
thousands of times.
"""
