"""Programs that nobody has read, run where they can do no harm.

`process` starts and ends the confined process; `inside` is what runs in it, and confines itself
with `namespaces`, `landlock` and `seccomp` before it touches a program. Nothing is imported here:
the confined process starts thousands of times.
"""
