# Run with -DNM -DLIBRARY [-DHEADER]: the library exports nothing but kvprism:: and the C functions
# that HEADER declares, all of them, and neither prints nor ends the process.
execute_process(
  COMMAND ${NM} -D -C --defined-only ${LIBRARY}
  OUTPUT_VARIABLE defined
  COMMAND_ERROR_IS_FATAL ANY
)
string(REGEX REPLACE ";" "," defined "${defined}")
string(REGEX MATCHALL "[^\n]+" lines "${defined}")
set(
  prefix
  "(typeinfo|typeinfo name|vtable|VTT|guard variable) for |(non-virtual|virtual) thunk to "
)
set(ours "^(${prefix})?kvprism::")
set(foreign "")
set(c_exported "")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^[0-9a-f]* +[A-Za-z] +" "" symbol "${line}")
  if(symbol MATCHES "^kvprism_[a-z_]+$")
    list(APPEND c_exported "${symbol}")
  elseif(NOT symbol MATCHES "${ours}")
    list(APPEND foreign "${symbol}")
  endif()
endforeach()

set(c_declared "")
if(HEADER)
  file(READ "${HEADER}" text)
  string(REPLACE ";" "," text "${text}")
  string(REGEX MATCHALL "KVPRISM_API [^,(]*kvprism_[a-z_]+\\(" declarations "${text}")
  foreach(declaration IN LISTS declarations)
    string(REGEX REPLACE ".*(kvprism_[a-z_]+)\\($" "\\1" name "${declaration}")
    list(APPEND c_declared "${name}")
  endforeach()
endif()
set(missing ${c_declared})
list(REMOVE_ITEM missing ${c_exported} "")
list(REMOVE_ITEM c_exported ${c_declared} "")
list(APPEND foreign ${c_exported})

execute_process(
  COMMAND ${NM} -D -C --undefined-only ${LIBRARY}
  OUTPUT_VARIABLE undefined
  COMMAND_ERROR_IS_FATAL ANY
)
# std::terminate stays: the C++ library itself asks for it. assert() speaks in debug builds only.
set(
  printing
  "std::(cout|cerr|clog)|std(out|err)|(__)?v?[fd]?printf(_chk)?|f?put(s|c|char)|fwrite|perror"
)
# _exit only finishes an exit that is under way (exit_guard.cpp).
set(ending "abort|exit|_Exit|quick_exit|raise")
string(REGEX MATCHALL " (${printing}|${ending})(@[^\n]*)?\n" unwanted "${undefined}")

if(foreign OR unwanted OR missing)
  list(JOIN foreign "\n  " foreign)
  list(JOIN unwanted "  " unwanted)
  list(JOIN missing "\n  " missing)
  message(
    FATAL_ERROR
    "Foreign symbols exported:\n  ${foreign}\nUnwanted symbols used:\n  ${unwanted}\n"
    "C functions declared and not exported:\n  ${missing}"
  )
endif()
