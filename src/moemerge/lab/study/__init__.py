"""`moemerge study`: a file becomes a list of commands, whose results become tables.

settings   the study file's keys
plan       read a file, check it, and list its commands; nothing is made
run        run the commands that are missing
tables     means, paired tests, one figure, and the files that show them
"""
