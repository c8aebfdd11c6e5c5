"""What several commands share: options, loading a model, tables, JSON, text for a terminal.

The files of `quantkit.cli` itself are the commands; nothing in this package is one. `options` and `plan_options` hold
the annotations of options, `launch` those of the commands that run a model, with the loading itself. `output` prints
tables and JSON, `plan_tables`, `evaluation` and `card` print one subject each. `progress_options` gives a command its
progress bar, `terminal` keeps the text of files from steering the terminal. A command gives parsed options and gets
values or text. The package imports every package below the command line, and no command.
"""
