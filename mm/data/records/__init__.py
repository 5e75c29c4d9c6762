"""What does a record contain?  Files of records, in any format, become ``Sample``s."""
