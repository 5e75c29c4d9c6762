"""What a weight is: names, fusion, cuts; pure."""
