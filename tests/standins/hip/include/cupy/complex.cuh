// In place of CuPy's header, which is written for another compiler.
#pragma once
#include <complex>
using std::complex;
namespace thrust { using std::complex; }
