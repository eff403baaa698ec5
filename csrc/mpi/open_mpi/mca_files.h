// Reads the files in which an administrator or a user sets Open MPI's (MCA) parameters. The
// environment overrides them, so dscomm must not put a default there that contradicts a file.
//
// Source: Open MPI 4.1, opal/mca/base/mca_base_var.c (which files are read, and in which order).
#pragma once

#include <istream>
#include <map>
#include <string>
#include <vector>

namespace dscomm {

// By name, without "OMPI_MCA_".
using McaParameters = std::map<std::string, std::string>;

// The parameters in a file, from lines "name = value". The value extends to the end of its
// line and may contain '#'; a line with '#' or "//" before '=' is a comment. The last line of a
// name wins. Open MPI also reads lines "-mca name value"; they are ignored here.
McaParameters parse_mca_file(std::istream& file);

// The files that Open MPI reads if they exist, by descending precedence. `library` is the path of
// libmpi: the configuration folder is above it or, for a library below /usr, in /etc.
std::vector<std::string> mca_file_names(const std::string& library);

// The parameters in the files of this process's libmpi. Skips unreadable files, as Open MPI does.
McaParameters parameters_of_mca_files();

}  // namespace dscomm
