// What a process asks of the library by environment variables, each read once.
#pragma once

namespace fk {

// FK_DETERMINISTIC: every call computes the same bits each time.
bool deterministic_by_environment();

// FK_CHECK: calls on a GPU check the values in index tensors, for which they wait for the stream.
bool checks_values_on_gpu();

// FK_LOG=dispatch: calls tell stderr which implementation, and which launches, they come to.
bool logs_dispatch();

}  // namespace fk
