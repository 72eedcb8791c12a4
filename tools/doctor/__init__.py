"""`trierarch doctor`: what is wrong with a configuration and with this machine, before anything is queued. No torch."""
