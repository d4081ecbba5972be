"""Check answers: numbers and formulas, programs, instructions, choices, exact texts.

Nothing is imported here, because worker processes start often and should start fast.
"""
