"""How the ranks share the work: degrees, limits, stages and traffic, by arithmetic alone. Imports no torch."""
