"""The benchmark of table 6 of FiSH: archives x variants x seeds of the UEA collection."""
