"""Whether an answer is right: numbers and formulas, programs, instructions, choices, exact words.

Nothing is imported here, as the processes that judge start many times and should start fast.
"""
