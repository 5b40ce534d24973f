[inputs: ["{mix,.formatter}.exs", "{lib,test,examples}/**/*.{ex,exs}"]]
