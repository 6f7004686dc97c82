local refused = refusal()
if refused then
    return refused
end
