"""Rules, PATTERN=TYPE: parse them, match tensor names, and find mistakes in patterns and in their order.

`--custom-q` and recipes use all of it; `-ot` shares the patterns and the checks (quantkit/placement/rules.py).
Nothing here knows a file, a plan or an importance matrix.
"""
