"""What a site wants: profiles, their limits, which one fits this host, and how a new one is written."""
