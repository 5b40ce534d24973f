[inputs: ["{mix,.formatter}.exs", "{lib,test,stand_ins,examples,bench}/**/*.{ex,exs}"]]
