// The functions of CPython's stable ABI that the binding uses, declared here and bound when torch
// is first used from Python, so that building needs no Python and one binary serves every version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fk::torch {

// What every object begins with (not in a CPython without its global lock, which has no stable
// ABI).
struct PyObject {
  int64_t reference_count;
  const void* type;
};

using PyFastFunction = PyObject* (*)(PyObject* self, PyObject* const* arguments, int64_t count);

struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int32_t flags;
  const char* doc;
};
constexpr int32_t kMethFastCall = 0x80;

// result, name, arguments
#define FK_PYTHON_FUNCTIONS(X)                                                                \
  X(PyObject*, PyCFunction_NewEx, (PyMethodDef*, PyObject * self, PyObject * module))         \
  X(PyObject*, PyCapsule_New, (void* pointer, const char* name, void (*)(PyObject*)))         \
  X(void*, PyCapsule_GetPointer, (PyObject*, const char* name))                               \
  X(PyObject*, PyErr_Occurred, ())                                                            \
  X(void, PyErr_Clear, ())                                                                    \
  X(void*, PyEval_SaveThread, ())                                                             \
  X(void, PyEval_RestoreThread, (void*))                                                      \
  X(double, PyFloat_AsDouble, (PyObject*))                                                    \
  X(long long, PyLong_AsLongLong, (PyObject*))                                                \
  X(PyObject*, PyObject_Vectorcall,                                                           \
    (PyObject * function, PyObject* const* arguments, size_t count, PyObject* keyword_names)) \
  X(PyObject*, PyTuple_New, (int64_t count))                                                  \
  X(int, PyTuple_SetItem, (PyObject * tuple, int64_t place, PyObject * item))                 \
  X(void, Py_DecRef, (PyObject*))                                                             \
  X(void, Py_IncRef, (PyObject*))

// type, name
#define FK_PYTHON_OBJECTS(X)  \
  X(PyObject, _Py_NoneStruct) \
  X(PyObject, _Py_TrueStruct) \
  X(PyObject, PyBool_Type)    \
  X(PyObject, PyFloat_Type)   \
  X(PyObject, PyLong_Type)

struct Python {
#define FK_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
  FK_PYTHON_FUNCTIONS(FK_DECLARE)
#undef FK_DECLARE
#define FK_DECLARE(type, name) type* name = nullptr;
  FK_PYTHON_OBJECTS(FK_DECLARE)
#undef FK_DECLARE

  // False where this process has not all of them.
  bool bind();
};

}  // namespace fk::torch
