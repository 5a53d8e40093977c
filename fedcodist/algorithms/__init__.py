"""The methods, by who trains what: `clients`, `pools`, `parties`, `graph`."""
