-- ARGV: 4 server time in ms when the request is too late, or '' if it never is.
-- A claim that was given up can be granted again, which a late release must not end.
if ARGV[4] ~= '' and now > tonumber(ARGV[4]) then
    return { 'lost', stamp, 0 }
end
