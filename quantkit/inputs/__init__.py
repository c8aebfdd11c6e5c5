"""Checks of input from outside, before it is used.

- `arguments` checks what callers pass to public functions.
- `regular_file` reads files within a limit on their size.
- `json_input` parses JSON within limits; `settings` reads settings of a `config.json` by their types.
- `safe_regex` searches with the patterns of users and files in bounded time.

Each takes raw values and gives checked ones, or raises an error of `errors`, which is all that this package imports.
"""
