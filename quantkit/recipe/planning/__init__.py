"""Plans: choose the type of every tensor from file type, rules and flags; check and replay the result.

planner         chooses; calls the others
presets         file types, such as Q4_K_M
mixes           the types that a file type gives by tensor class and layer
fallback        types for rows that do not fit the chosen type
interleaving    the row-interleaved types of a plan, for --repack
planned         the result: Plan, PlannedTensor, RuleUse
lint            warnings and notes about a finished plan
replay          a plan read from the JSON of `plan --json`, for the tensors of another file
"""
