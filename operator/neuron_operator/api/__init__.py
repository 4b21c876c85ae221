"""The contract of NeuronModel: fields, status, schema, parser, names, reasons and errors. It imports no other room."""
