"""The methods, by the names that configs give them."""

# In the order of tables and legends.
METHOD_NAMES = {
    "fed_avg": "FedAvg",
    "periodic_codistillation": "PeriodicCodist",
    "merged_codistillation": "MergedCodist",
}
METHODS = tuple(METHOD_NAMES)
BASELINE = "fed_avg"
CODISTILLATION = tuple(name for name in METHODS if name != BASELINE)
