# Run with -DNM -DLIBRARY: the library exports nothing but kvprism:: and kvprism_*, and neither
# prints nor ends the process.
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
set(ours "^(${prefix})?kvprism(::|_)")
set(foreign "")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^[0-9a-f]* +[A-Za-z] +" "" symbol "${line}")
  if(NOT symbol MATCHES "${ours}")
    list(APPEND foreign "${symbol}")
  endif()
endforeach()

execute_process(
  COMMAND ${NM} -D -C --undefined-only ${LIBRARY}
  OUTPUT_VARIABLE undefined
  COMMAND_ERROR_IS_FATAL ANY
)
string(
  REGEX MATCHALL " (std::cout|printf|puts|putchar|exit|_exit)(@[^\n]*)?\n"
  unwanted
  "${undefined}"
)

if(foreign OR unwanted)
  list(JOIN foreign "\n  " foreign)
  list(JOIN unwanted "  " unwanted)
  message(
    FATAL_ERROR
    "Foreign symbols exported:\n  ${foreign}\nUnwanted symbols used:\n  ${unwanted}"
  )
endif()
