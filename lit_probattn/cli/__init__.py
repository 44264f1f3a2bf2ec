"""The command line `python -m lit_probattn {fit,validate,test,predict}`."""
