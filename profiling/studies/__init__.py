"""Stand-alone measurements, each a program."""
